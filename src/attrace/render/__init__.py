"""Attribution -> terminal, HTML, JSON.  Imports no framework; one file per form, imported by its own name."""
