"""The pipeline file and the installation's settings.

`model` is the whole file, made of the models in `processors`, `engine`, `sensing` and those of the kinds of sources and
sinks (`sources` and `sinks` have what all kinds share); `file` reads, checks and documents it; `env` expands environment variables in it. `settings` are the environment
variables of an installation.
"""
