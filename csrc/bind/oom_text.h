/* oom_text: the text of the error that every door raises when it cannot allocate. Pure but
 * for the prefix. */
#ifndef TP_BIND_OOM_TEXT_H
#define TP_BIND_OOM_TEXT_H

#include "tp.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { TP_OOM_TEXT_BYTES = 1536 };

/* Writes the text for a failed request on the device of `slot`, always terminated; `error`
 * is the core's answer. True: memory was short, and the text says so with all figures;
 * false: something else is wrong, and the text says what. */
TP_API bool tp_oom_text(char *text, size_t size, int slot, const tp_oom *oom,
                        const tp_error *error);
/* Replaces the first words, "CUDA out of memory.", which programs match on. At most 95 bytes
 * are kept; an empty string restores them. */
TP_API void tp_oom_text_set_prefix(const char *prefix);

#ifdef __cplusplus
}
#endif

#endif
