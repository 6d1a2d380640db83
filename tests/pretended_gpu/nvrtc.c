/* NVRTC: torch has it compile some kernels at their first launch (prod, exp2); this one compiles them to nothing. */
#include <stdlib.h>

int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
const char *nvrtcGetErrorString(int error) { return "pretended"; }
int nvrtcCreateProgram(void **program) { *program = calloc(1, 1); return 0; }
int nvrtcDestroyProgram(void **program) { free(*program); return 0; }
int nvrtcAddNameExpression(void) { return 0; }
int nvrtcCompileProgram(void) { return 0; }
int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) { *lowered = name; return 0; }
int nvrtcGetCUBINSize(void *program, size_t *size) { *size = 1; return 0; }
int nvrtcGetCUBIN(void *program, char *code) { *code = 0; return 0; }
int nvrtcGetPTXSize(void *program, size_t *size) { *size = 1; return 0; }
int nvrtcGetPTX(void *program, char *code) { *code = 0; return 0; }
int nvrtcGetProgramLogSize(void *program, size_t *size) { *size = 1; return 0; }
int nvrtcGetProgramLog(void *program, char *text) { *text = 0; return 0; }
