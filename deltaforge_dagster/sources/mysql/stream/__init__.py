"""Reading MySQL's binary log: the `dump`, `log_sections` for several readers, and scans that decode no row."""
