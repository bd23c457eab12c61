"""What a benchmark cost in processor time.

By process (`processes`), by thread (`threads`), and by stage of a run (`stages`).
"""
