// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

const (
	// filePrefix is how the files of a directory start that are read.
	filePrefix = "ip-masq"

	// maxFileSize is far more than fits into a ConfigMap (1 MiB), which also
	// holds some 50,000 prefixes.
	maxFileSize = 4 << 20
)

// source is the content of a file.
type source struct {
	file string
	data []byte
}

// readFiles reads the file at path, or those of the directory there in the
// order of their names. No file is no error.
func readFiles(path string, r *report) ([]source, error) {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find config: %w", err)
	}
	if !info.IsDir() {
		return appendFile(nil, path, r)
	}
	return readDirectory(path, r)
}

func readDirectory(path string, r *report) ([]source, error) {
	entries, err := os.ReadDir(path) // sorted by name
	if err != nil {
		return nil, fmt.Errorf("read config directory: %w", err)
	}
	var files []source
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), filePrefix) {
			continue
		}
		file := filepath.Join(path, e.Name())
		info, err := os.Stat(file) // through links, of which a ConfigMap's directory consists
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			return nil, fmt.Errorf("find config file: %w", err)
		case info.IsDir():
			r.fault(place{file: file}, "", "", "is a directory, %s* must be files", filePrefix)
			continue
		case !info.Mode().IsRegular():
			r.fault(place{file: file}, "", "", "is not a regular file")
			continue
		}
		if files, err = appendFile(files, file, r); err != nil {
			return nil, err
		}
	}
	return files, nil
}

// appendFile reads one file. It may be gone since it was found, in the middle
// of an update: then it is as if it had never been there.
func appendFile(files []source, path string, r *report) ([]source, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return files, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read config file: %w", err)
	}
	defer f.Close() //nolint:errcheck // it was only read
	data, err := io.ReadAll(io.LimitReader(f, maxFileSize+1))
	if err != nil {
		return nil, fmt.Errorf("read config file: %w", err)
	}
	if len(data) > maxFileSize {
		r.fault(place{file: path}, "", "", "is larger than %d MiB", maxFileSize>>20)
		return files, nil
	}
	return append(files, source{file: path, data: data}), nil
}
