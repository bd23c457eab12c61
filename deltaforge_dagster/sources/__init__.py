"""Sources: one package or module per database, all behind `base.Source`."""
