"""Memory mechanisms, one file each."""
