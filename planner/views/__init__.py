"""Plans and differences as a person reads them."""
