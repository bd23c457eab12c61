"""Pipeline files: read with lines kept (`document`), checked (`load`), and documented."""
