# An image with the trainer in /annulus, for hosts with TPUs or NVIDIA GPUs:
#
#   docker build --build-arg ACCELERATOR=tpu --tag IMAGE .     # or gpu
#
# A GPU's host brings the driver (580 or later, for CUDA 13) and NVIDIA's container
# toolkit. See docs/many_hosts.md.
FROM python:3.12-slim
ARG ACCELERATOR=tpu
WORKDIR /annulus
# Before the source, so that a change of the source installs nothing again.
COPY requirements.txt ./
COPY requirements ./requirements
RUN pip install --no-cache-dir -r requirements/${ACCELERATOR}.txt
COPY . .
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV PYTHONUNBUFFERED=1
CMD ["python", "train.py", "--help"]
