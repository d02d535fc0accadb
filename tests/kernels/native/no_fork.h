/* NO_FORK: the thread sanitizer and QEMU do not let a forked child have threads. */

#if defined(__SANITIZE_THREAD__) || defined(EMULATED)
#define NO_FORK
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define NO_FORK
#endif
#endif
