"""Attribution -> terminal, HTML, JSON.  Imports no framework."""
