"""Programs: parse, call the api, print."""
