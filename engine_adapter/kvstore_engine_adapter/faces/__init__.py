"""The engine's HTTP faces: OpenAI's and TGI's, sessions, and the doors before them."""
