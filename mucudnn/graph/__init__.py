"""Models as graphs of operators that run in bands of rows: capturing, planning and running them."""
