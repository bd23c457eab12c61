"""Commands that show and change the state of pipelines."""
