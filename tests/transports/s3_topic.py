"""A topic on the S3 server of the tests, and ways around its transport."""

import contextlib

from .conformance import Topic


class S3Topic(Topic):
    def __init__(self, seaweed, bucket, prefix):
        super().__init__(f"s3://{bucket}/{prefix}", **seaweed.options())
        self.seaweed = seaweed
        self.bucket = bucket
        self.prefix = prefix

    async def stored_blob(self, key):
        async with self.seaweed.client() as client:
            with contextlib.suppress(client.exceptions.NoSuchKey):
                answer = await client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{key}")
                return await answer["Body"].read()

    async def remove_records(self, log, before):
        async with self.seaweed.client() as client:
            for position in range(before):
                await client.delete_object(Bucket=self.bucket, Key=f"{self.prefix}/logs/{log}/{position:020}")
