/* Functions of NVIDIA's libraries that must return more than success. Those that compute are in stubs.c, written by build.py:
   kernels.py computes the operator that calls them. */
#include "pretended.h"

/* ---- cuBLAS */
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int requested, char *results, int *found) {
  memset(results, 0, 96); /* one cublasLtMatmulHeuristicResult_t: an algorithm without a workspace */
  *found = 1;
  return 0;
}

/* ---- cuDNN: one algorithm, without a workspace */
typedef struct { /* cudnnConvolution...AlgoPerf_t */
  int algorithm, status;
  float time;
  size_t memory;
  int determinism, math, reserved[3];
} performance;

static int one_algorithm(int *count, performance *found) {
  *count = 1;
  memset(found, 0, sizeof *found);
  found->determinism = 1;
  return 0;
}
#define NO_WORKSPACE(name, ...) \
  int name(__VA_ARGS__, size_t *size) { *size = 0; return 0; }
#define ALGORITHM(direction)                                                                                            \
  int cudnnGetConvolution##direction##Algorithm_v7(void *h, void *a, void *b, void *c, void *d, int wanted, int *count, \
                                                   performance *found) {                                                \
    return one_algorithm(count, found);                                                                                 \
  }                                                                                                                     \
  int cudnnFindConvolution##direction##AlgorithmEx(void *h, void *a, void *x, void *b, void *y, void *c, void *d,        \
                                                   void *z, int wanted, int *count, performance *found, void *workspace, \
                                                   size_t size) {                                                       \
    return one_algorithm(count, found);                                                                                 \
  }                                                                                                                     \
  NO_WORKSPACE(cudnnGetConvolution##direction##WorkspaceSize, void *h, void *a, void *b, void *c, void *d, int algorithm)
ALGORITHM(Forward)
ALGORITHM(BackwardData)
ALGORITHM(BackwardFilter)
NO_WORKSPACE(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, void *h, int mode, int ops, void *x, void *z, void *y, void *b,
             void *activation)
NO_WORKSPACE(cudnnGetBatchNormalizationBackwardExWorkspaceSize, void *h, int mode, int ops, void *x, void *y, void *dy, void *dz,
             void *dx, void *b, void *activation)
NO_WORKSPACE(cudnnGetBatchNormalizationTrainingExReserveSpaceSize, void *h, int mode, int ops, void *activation, void *x)
