"""JSON-RPC between hosts: `client` pushes items to another host's `jsonrpcd`, which is in `server`."""
