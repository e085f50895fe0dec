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
    #define FASTCAP_PAGE ((uintptr_t)4096)              /* bytes; where pages are bigger, the kernel refuses the advice */
    #define FASTCAP_HUGE_PAGE ((uintptr_t)2 << 20)      /* bytes; x86-64, and arm64 with pages of 4 KiB */
    #define FASTCAP_BIG_BLOCK ((size_t)4 << 20)         /* bytes; smaller blocks are left alone */

    /* Tell the kernel that fresh memory will be written from end to end. A hint: failure is no harm. The page in which
       it starts is included, so that a huge page that begins with malloc's header may be too. */
    static inline void fastcap_prefer_huge_pages(void *start, size_t size) {
    #if defined(__linux__) && defined(MADV_HUGEPAGE)
        if (start != NULL && size >= FASTCAP_BIG_BLOCK) {
            uintptr_t first = (uintptr_t)start & ~(FASTCAP_PAGE - 1);
            uintptr_t end = ((uintptr_t)start + size) & ~(FASTCAP_PAGE - 1);
            (void)madvise((void *)first, end - first, MADV_HUGEPAGE);
        }
    #else
        (void)start;
        (void)size;
    #endif
    }

    /* The same for memory that is written right now: all of its pages are mapped (Linux 5.14). Otherwise a fault stops the
       copying at each of them. The last huge page is left out where most of it would stay unused. */
    static inline void fastcap_populate_pages(void *start, size_t size) {
    #if defined(__linux__) && defined(MADV_HUGEPAGE)
        if (size >= FASTCAP_BIG_BLOCK) {
            uintptr_t first = (uintptr_t)start & ~(FASTCAP_PAGE - 1);
            uintptr_t end = ((uintptr_t)start + size + FASTCAP_HUGE_PAGE / 2) & ~(FASTCAP_HUGE_PAGE - 1);
            (void)madvise((void *)first, end - first, MADV_HUGEPAGE);
    #if defined(MADV_POPULATE_WRITE)
            (void)madvise((void *)first, end - first, MADV_POPULATE_WRITE);
    #endif
        }
    #else
        (void)start;
        (void)size;
    #endif
    }

    /* A size for a block that starts with a huge page, and whose last byte lies behind those that are of use: since Linux
       6.7 a mapping of whole huge pages does (thp_get_unmapped_area in mm/huge_memory.c), and malloc maps big blocks
       one by one. */
    static inline size_t fastcap_whole_huge_pages(size_t size) {
        if (size < FASTCAP_BIG_BLOCK) return size;
        return ((size + FASTCAP_HUGE_PAGE - 1) & ~(size_t)(FASTCAP_HUGE_PAGE - 1)) + FASTCAP_HUGE_PAGE;
    }
    #endif
    """
    void prefer_huge_pages "fastcap_prefer_huge_pages" (void* start, size_t size) noexcept nogil
    void populate_pages "fastcap_populate_pages" (void* start, size_t size) noexcept nogil
    size_t whole_huge_pages "fastcap_whole_huge_pages" (size_t size) noexcept nogil
