"""Read the rows of the user's files, of every supported kind of file and conversation format."""
