/*
 * key_text.h
 *		A key as text for people, and for patterns.  All files may include it.
 */
#ifndef KEY_TEXT_H
#define KEY_TEXT_H

extern char *rl_key_shown(const char *data, int len);
extern char *rl_key_matched(const char *data, int len);

#endif							/* KEY_TEXT_H */
