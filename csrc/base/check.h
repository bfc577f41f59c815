/* check: asserts in three levels.
 *
 * TP_REQUIRE   contract: the caller broke a precondition. On in debug builds.
 * TP_ASSERT    internal: this module broke its own invariant. On in debug builds.
 * TP_ASSERT_SLOW  walks data structures. On with -DTP_DEBUG=2.
 *
 * A failing assert traps (so that a sanitizer or debugger stops there); release builds contain
 * none: the library never aborts a user's process. */
#ifndef TP_BASE_CHECK_H
#define TP_BASE_CHECK_H

#ifndef TP_DEBUG
#define TP_DEBUG 0
#endif

#if TP_DEBUG
#define TP_ASSERT(cond) ((cond) ? (void)0 : __builtin_trap())
#define TP_REQUIRE(cond) TP_ASSERT(cond)
#else
#define TP_ASSERT(cond) ((void)sizeof((cond) ? 1 : 0))
#define TP_REQUIRE(cond) TP_ASSERT(cond)
#endif

#if TP_DEBUG > 1
#define TP_ASSERT_SLOW(cond) TP_ASSERT(cond)
#else
#define TP_ASSERT_SLOW(cond) ((void)sizeof((cond) ? 1 : 0))
#endif

#endif
