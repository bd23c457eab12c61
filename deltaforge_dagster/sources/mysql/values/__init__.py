"""Values of MySQL as JSON text: `types` decides the form of each type, the other modules write it."""
