/* name: names of operators as small numbers, the same in the whole process and for as long as it
 * lives. Pure; no lock: names are only ever added. */
#ifndef TP_PAGER_NAME_H
#define TP_PAGER_NAME_H

#include <stdbool.h>
#include <stdint.h>

enum { TP_NAMES_MAX = 4096 };

/* The number of "aten::add_.Tensor" (name, dot, overload), not 0. 0: the table is full, or host
 * memory short; such operators share one name. Called once for each operator and thread. */
uint32_t tp_name_id(const char *name);
/* "" for 0 and for what is no number of a name. */
const char *tp_name_text(uint32_t id);
/* Whether such an operator goes over each operand once (tp_trace_op.streams). */
bool tp_name_streams(uint32_t id);

#endif
