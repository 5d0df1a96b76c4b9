"""What a run says: the terminal's tables and closing line, and the JSON file that every other report is made from."""
