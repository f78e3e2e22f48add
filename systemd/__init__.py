"""Unit files for systemd, as data; `quantd service` installs them."""
