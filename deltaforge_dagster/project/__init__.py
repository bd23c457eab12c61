"""Pipelines within other people's Dagster projects: as components, or as definitions to merge.

`components` and `definitions` are imported by projects that do not use them, too, so they import
Dagster only; the rest follows when a pipeline is loaded. `translation` reads what a component says
about names, `scaffolding` writes new components.
"""
