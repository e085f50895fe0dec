# Big blocks of memory in big pages.
#
# A buffer that grows to megabytes is mapped by the kernel 4 KiB at a time, and each page costs a fault; where transparent
# huge pages are to be had by madvise (the default of most Linux distributions), 2 MiB come at once. This halves the time
# of a dump that mostly copies an array.
cdef extern from *:
    """
    #ifndef FASTCAP_PAGES
    #define FASTCAP_PAGES
    #if defined(__linux__)
    #include <sys/mman.h>
    #endif
    #include <stdint.h>
    /* Tell the kernel that a fresh block of `size` bytes will be written from end to end. A hint: failure is no harm. */
    static inline void fastcap_prefer_huge_pages(void *block, size_t size) {
    #if defined(__linux__) && defined(MADV_HUGEPAGE)
        if (block != NULL && size >= ((size_t)4 << 20)) {
            uintptr_t start = ((uintptr_t)block + 4095) & ~(uintptr_t)4095;
            uintptr_t end = ((uintptr_t)block + size) & ~(uintptr_t)4095;
            (void)madvise((void *)start, end - start, MADV_HUGEPAGE);
        }
    #else
        (void)block;
        (void)size;
    #endif
    }
    #endif
    """
    void prefer_huge_pages "fastcap_prefer_huge_pages" (void* block, size_t size) noexcept nogil
