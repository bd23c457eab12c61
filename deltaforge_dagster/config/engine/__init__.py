"""The block spec.engine: the fields that DeltaForge does not have."""
