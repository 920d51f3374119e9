"""The form of the artifacts: schemas, readings and decisions, the one form on disk, the seal, the store. No torch."""
