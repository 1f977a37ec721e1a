"""Pretended machines that tests run the unchanged package on."""
