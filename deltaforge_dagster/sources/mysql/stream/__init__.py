"""MySQL's binary log: the `dump`, `log_sections` for several readers, scans that decode no row."""
