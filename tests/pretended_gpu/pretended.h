/* What the files of the pretended runtime share. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "cuda_runtime_api.h"

/* Memory of a device, as cudaMalloc gives it. */
cudaError_t pretended_take(void **at, size_t size);
cudaError_t pretended_give(void *at);

/* A handle that torch only hands back. */
void *pretended_handle(void);

/* Whether an operator that kernels.py computes is what has launched this kernel; else its name is printed. */
int pretended_computed(const char *kernel);

/* A function that the runtime lacks. */
int pretended_missing(const char *function);

/* Work that goes on beside the program, in the order of a stream: `begin` queues it there and gives its number, `turn` waits
   for what was queued on the stream before it, and `end` says that it is done. */
unsigned long pretended_begin(cudaStream_t stream);
void pretended_turn(cudaStream_t stream, unsigned long number);
void pretended_end(cudaStream_t stream, unsigned long number);
