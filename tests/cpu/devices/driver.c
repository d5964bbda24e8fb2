/* A driver whose device memory is host memory: cuMemcpyBatchAsync with the binary interface of CUDA 12.8.

   Compiled with -DHAVE_CUDA_H, the compiler checks the definitions against NVIDIA's header. Arguments are checked as the
   header demands. Copies run in reverse order, because a batch guarantees no order. No copy may touch two registered
   ranges. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef HAVE_CUDA_H
#define __CUDA_API_VERSION_INTERNAL /* declares the symbols of earlier versions too */
#include <cuda.h>
#else
typedef enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 } CUresult;
typedef unsigned long long CUdeviceptr;
typedef struct CUstream_st *CUstream;
typedef struct { int type; int id; } CUmemLocation;
typedef struct {
    int srcAccessOrder;
    CUmemLocation srcLocHint;
    CUmemLocation dstLocHint;
    unsigned int flags;
} CUmemcpyAttributes;
enum { CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE = 1 };
#endif

/* Sizes, offsets and constants that the caller must use. */
const size_t interface[] = {
    sizeof(CUmemLocation),
    offsetof(CUmemLocation, type),
    offsetof(CUmemLocation, id),
    sizeof(CUmemcpyAttributes),
    offsetof(CUmemcpyAttributes, srcAccessOrder),
    offsetof(CUmemcpyAttributes, srcLocHint),
    offsetof(CUmemcpyAttributes, dstLocHint),
    offsetof(CUmemcpyAttributes, flags),
    sizeof(CUdeviceptr),
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
};

#define MAX_RANGES 1024

static struct { uintptr_t address; size_t size; } ranges[MAX_RANGES];
static size_t num_ranges;
static size_t num_copies;

int register_range(uintptr_t address, size_t size) {
    for (size_t i = 0; i < num_ranges; i++)
        if (address < ranges[i].address + ranges[i].size && ranges[i].address < address + size)
            return 712; /* cudaErrorHostMemoryAlreadyRegistered */
    if (num_ranges == MAX_RANGES)
        return 2; /* cudaErrorMemoryAllocation */
    ranges[num_ranges].address = address;
    ranges[num_ranges++].size = size;
    return 0;
}

int unregister_range(uintptr_t address) {
    for (size_t i = 0; i < num_ranges; i++)
        if (ranges[i].address == address) {
            ranges[i] = ranges[--num_ranges];
            return 0;
        }
    return 713; /* cudaErrorHostMemoryNotRegistered */
}

/* Copies since the last call. */
size_t take_num_copies(void) {
    size_t taken = num_copies;
    num_copies = 0;
    return taken;
}

static int within_one_range(CUdeviceptr address, size_t size) {
    for (size_t i = 0; i < num_ranges; i++) {
        uintptr_t begin = ranges[i].address, end = begin + ranges[i].size;
        if (address < end && begin < address + size && (address < begin || end < address + size))
            return 0;
    }
    return 1;
}

CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                            CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, size_t *failIdx,
                            CUstream hStream) {
    *failIdx = SIZE_MAX;
    if (!dsts || !srcs || !sizes || !count || !hStream || numAttrs != 1 || attrsIdxs[0] != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (attrs->srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || attrs->srcLocHint.type || attrs->srcLocHint.id ||
        attrs->dstLocHint.type || attrs->dstLocHint.id || attrs->flags > CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (!dsts[i] || !srcs[i] || !sizes[i] || !within_one_range(dsts[i], sizes[i]) ||
            !within_one_range(srcs[i], sizes[i])) {
            *failIdx = i;
            return CUDA_ERROR_INVALID_VALUE;
        }
    for (size_t i = count; i-- > 0;)
        memcpy((void *)(uintptr_t)dsts[i], (const void *)(uintptr_t)srcs[i], sizes[i]);
    num_copies += count;
    return CUDA_SUCCESS;
}
