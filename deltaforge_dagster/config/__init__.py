"""The pipeline file and the installation's settings.

`model` is the whole file, made of the models in `sources`, `processors`, `engine`, `sensing` and those of the kinds of
sinks; `file` reads, checks and documents it; `env` expands environment variables in it. `settings` are the environment
variables of an installation.
"""
