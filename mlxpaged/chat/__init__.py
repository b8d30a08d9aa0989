"""Conversations above the engine: the Backend every face speaks through, chat templates, later tools and sessions."""
