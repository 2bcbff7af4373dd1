"""FastAPI: ``uvicorn --workers CORES fastapi_app:app``. The work is a few ms of CPU, so it stays in the event loop:
handing it to a thread costs more than it gains when every core has a worker of its own."""

from common import classify
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

app = FastAPI()


@app.post("/predict")
async def predict(request: Request) -> JSONResponse:
    return JSONResponse(classify(await request.body()))
