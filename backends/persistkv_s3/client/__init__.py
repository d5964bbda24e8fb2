"""Requests to an object store: single attempts with boto3, retries, the breaker."""
