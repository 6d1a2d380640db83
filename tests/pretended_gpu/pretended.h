/* Functions that the files of the pretended runtime share. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "cuda_runtime_api.h"

/* A dummy handle, which torch only passes back. */
void *pretended_handle(void);

/* Whether kernels.py computes the operator that launched this kernel; if not, prints the kernel's name. */
int pretended_computed(const char *kernel);

/* Reports a call of a function that the runtime lacks. */
int pretended_missing(const char *function);

/* Work in the background, in the order of a stream: `begin` queues it and returns its number, `turn` waits for the work queued
   before it on the stream, `end` marks it as done. */
unsigned long pretended_begin(cudaStream_t stream);
void pretended_turn(cudaStream_t stream, unsigned long number);
void pretended_end(cudaStream_t stream, unsigned long number);
