"""Values of MySQL as JSON text: `types` defines each type's format, the other modules write it."""
