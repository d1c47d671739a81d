// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"regexp"
	"strconv"
	"unicode/utf8"
)

// yamlSyntaxError takes the line out of the library's message for data, or
// finds it where the message does not have the right one.
func yamlSyntaxError(err error, data []byte) (line int, text string) {
	text = err.Error()
	if m := regexp.MustCompile(`^yaml: (?:line (\d+): )?(.*)$`).FindStringSubmatch(text); m != nil {
		line, _ = strconv.Atoi(m[1]) // digits, or nothing for the first line
		text = "yaml: " + m[2]
	}
	// What the parser finds, and not the scanner below it, is counted from 0.
	parser := regexp.MustCompile(`did not find expected ([<'],?|key|node)|directive$|incompatible|undefined tag`)
	switch anchor := regexp.MustCompile(`unknown anchor '(.*)'`).FindStringSubmatch(text); {
	case line > 0 && parser.MatchString(text):
		line++
	case line > 0:
	case anchor != nil:
		line = lineAt(data, bytes.Index(data, []byte("*"+anchor[1])))
	default:
		line = lineAt(data, unreadable(data))
	}
	return min(line, lineAt(data, len(data))), text // the end may count as a line of its own
}

// lineAt is the line of the byte at offset, the first one if that is negative.
func lineAt(data []byte, offset int) int {
	return 1 + bytes.Count(data[:max(offset, 0)], []byte("\n"))
}

// unreadable finds the first byte that YAML does not allow: in no encoding that
// it knows, or a control character. It is -1 if there is none.
func unreadable(data []byte) int {
	for i := 0; i < len(data); {
		r, size := utf8.DecodeRune(data[i:])
		control := r < 0x20 && r != '\t' && r != '\n' && r != '\r' || 0x7f <= r && r < 0xa0 && r != 0x85
		if control || r == utf8.RuneError && size == 1 {
			return i
		}
		i += size
	}
	return -1
}
