"""What a benchmark cost in processor time: by process (`processes`), by thread (`threads`), by stage of a run (`stages`)."""
