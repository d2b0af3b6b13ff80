"""The operations on files and batches: a row for each of their routes."""

from __future__ import annotations

from functools import partial

from coordinator.api.messages.errors import FailedCall
from coordinator.api.openapi.operation import READS_BODY, Operation, in_path, in_query
from coordinator.jobs.message_objects import (
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchPage,
    MessageBatchRequest,
)
from coordinator.jobs.objects import (
    BatchList,
    BatchRequest,
    BatchShown,
    DeletedFile,
    FileList,
    FileShown,
)

_FILE = in_path("file", "The file's id.")
_BATCH = in_path("batch", "The batch's id.")
_LIMIT = in_query("limit", "The most entries on a page.", type="integer", minimum=1)
_AFTER = in_query("after", "The id of the last entry on the page before.", type="string")
_of_files = partial(Operation, tag="Batches", errors=(401, 404, 503), parameters=(_FILE,))
_of_batches = partial(Operation, tag="Batches", errors=(401, 404, 503), parameters=(_BATCH,))

_AFTER_ID = in_query("after_id", "The id of the last entry on the page before.", type="string")
_BEFORE_ID = in_query("before_id", "The id of the first entry on the page after.", type="string")
_of_messages = partial(
    Operation,
    tag="Batches",
    error=FailedCall,
    errors=(400, 401, 404, 529),
    parameters=(_BATCH,),
)

OPERATIONS = (
    _of_files(
        method="post",
        path="/v1/files",
        name="createFile",
        summary="Upload the lines of a batch, as a form.",
        answer=FileShown,
        errors=(400, 401, 403, 408, 413, 415, 429, 503),
        parameters=(),
    ),
    _of_files(
        method="get",
        path="/v1/files",
        name="listFiles",
        summary="List files, page by page.",
        answer=FileList,
        errors=(400, 401, 404, 503),
        parameters=(_LIMIT, _AFTER),
    ),
    _of_files(
        method="get",
        path="/v1/files/{file}",
        name="getFile",
        summary="Describe a file.",
        answer=FileShown,
    ),
    _of_files(
        method="delete",
        path="/v1/files/{file}",
        name="deleteFile",
        summary="Delete a file.",
        answer=DeletedFile,
    ),
    _of_files(
        method="get",
        path="/v1/files/{file}/content",
        name="getFileContent",
        summary="Get the bytes of a file.",
        media="application/octet-stream",
    ),
    _of_batches(
        method="post",
        path="/v1/batches",
        name="createBatch",
        summary="Have the lines of a file answered.",
        body=BatchRequest,
        examples=(
            {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
        ),
        answer=BatchShown,
        errors=(*READS_BODY, 429),
        parameters=(),
    ),
    _of_batches(
        method="get",
        path="/v1/batches",
        name="listBatches",
        summary="List batches, the newest first, page by page.",
        answer=BatchList,
        errors=(400, 401, 404, 503),
        parameters=(_LIMIT, _AFTER),
    ),
    _of_batches(
        method="get",
        path="/v1/batches/{batch}",
        name="getBatch",
        summary="Describe a batch, and count its lines.",
        answer=BatchShown,
    ),
    _of_batches(
        method="post",
        path="/v1/batches/{batch}/cancel",
        name="cancelBatch",
        summary="Have a batch end early; what is answered is kept.",
        answer=BatchShown,
        errors=(400, 401, 404, 503),
    ),
    _of_messages(
        method="post",
        path="/v1/messages/batches",
        name="createMessageBatch",
        summary="Have messages answered.",
        body=MessageBatchRequest,
        examples=({"requests": [{"custom_id": "1", "params": {"model": "M"}}]},),
        answer=MessageBatch,
        errors=(400, 401, 404, 408, 413, 415, 417, 429, 529),
        parameters=(),
    ),
    _of_messages(
        method="get",
        path="/v1/messages/batches",
        name="listMessageBatches",
        summary="List message batches, the newest first, page by page.",
        answer=MessageBatchPage,
        errors=(400, 401, 404, 529),
        parameters=(_LIMIT, _AFTER_ID, _BEFORE_ID),
    ),
    _of_messages(
        method="get",
        path="/v1/messages/batches/{batch}",
        name="getMessageBatch",
        summary="Describe a message batch, and count its requests.",
        answer=MessageBatch,
    ),
    _of_messages(
        method="delete",
        path="/v1/messages/batches/{batch}",
        name="deleteMessageBatch",
        summary="Delete a message batch that has ended.",
        answer=DeletedMessageBatch,
    ),
    _of_messages(
        method="post",
        path="/v1/messages/batches/{batch}/cancel",
        name="cancelMessageBatch",
        summary="Have a message batch end early; what is answered is kept.",
        answer=MessageBatch,
    ),
    _of_messages(
        method="get",
        path="/v1/messages/batches/{batch}/results",
        name="getMessageBatchResults",
        summary="Get what became of each request of a message batch that has ended.",
        media="application/x-jsonl",
    ),
)
