"""The HTTP face: routes and pure translation between wire formats and the Backend."""
