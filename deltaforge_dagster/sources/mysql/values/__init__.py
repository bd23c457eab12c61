"""Values of MySQL as JSON text: `types` defines the format of each type, the other modules write it."""
