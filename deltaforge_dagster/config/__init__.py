"""The pipeline file: environment expansion, models, templates; and the installation's settings."""
