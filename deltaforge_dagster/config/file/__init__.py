"""Pipeline files: read with lines kept (`document`), variables expanded (`env`), checked (`load`), and documented."""
