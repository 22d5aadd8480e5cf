"""The record: tables, and the only modules that contain statements about them."""
