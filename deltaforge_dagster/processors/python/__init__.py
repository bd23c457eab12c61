"""The Python processor: `modules` finds the user's function, `function` calls it.

A function with a time limit is called in a child process (`child`).
"""
