// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// The part of SPDX 2.3 that is used here (https://spdx.github.io/spdx-spec/v2.3/).
type document struct {
	Version       string         `json:"spdxVersion"`
	License       string         `json:"dataLicense"`
	ID            string         `json:"SPDXID"`
	Name          string         `json:"name"`
	Namespace     string         `json:"documentNamespace"`
	Creation      creationInfo   `json:"creationInfo"`
	Packages      []spdxPackage  `json:"packages"`
	Relationships []relationship `json:"relationships"`
}

type creationInfo struct {
	Created  string   `json:"created"`
	Creators []string `json:"creators"`
}

type spdxPackage struct {
	ID               string        `json:"SPDXID"`
	Name             string        `json:"name"`
	Version          string        `json:"versionInfo"`
	Supplier         string        `json:"supplier,omitempty"`
	DownloadLocation string        `json:"downloadLocation"`
	FilesAnalyzed    bool          `json:"filesAnalyzed"`
	LicenseDeclared  string        `json:"licenseDeclared"`
	LicenseConcluded string        `json:"licenseConcluded"`
	Copyright        string        `json:"copyrightText"`
	References       []externalRef `json:"externalRefs,omitempty"`
}

type externalRef struct {
	Category string `json:"referenceCategory"`
	Type     string `json:"referenceType"`
	Locator  string `json:"referenceLocator"`
}

type relationship struct {
	From string `json:"spdxElementId"`
	Type string `json:"relationshipType"`
	To   string `json:"relatedSpdxElement"`
}

const (
	documentID  = "SPDXRef-DOCUMENT"
	agentID     = "SPDXRef-ip-masq-agent"
	noAssertion = "NOASSERTION"
)

// newDocument describes the agent of a version and its parts.
func newDocument(version string, created time.Time, parts []part) document {
	d := document{
		Version: "SPDX-2.3", License: "CC0-1.0", ID: documentID, Name: "ip-masq-agent-" + version,
		Namespace: "https://spdx.org/spdxdocs/ip-masq-agent-" + version + "-" + digest(parts),
		Creation:  creationInfo{Created: created.Format(time.RFC3339), Creators: []string{"Tool: ip-masq-agent-sbom"}},
		Packages: []spdxPackage{{
			ID: agentID, Name: "ip-masq-agent", Version: version, DownloadLocation: noAssertion, Copyright: noAssertion,
			LicenseDeclared:  "Apache-2.0 AND (GPL-2.0-only OR BSD-2-Clause)",
			LicenseConcluded: noAssertion,
		}},
		Relationships: []relationship{{From: documentID, Type: "DESCRIBES", To: agentID}},
	}
	for _, p := range parts {
		id := identifier(p)
		d.Packages = append(d.Packages, spdxPackage{
			ID: id, Name: p.name, Version: p.version, Supplier: p.supplier, DownloadLocation: noAssertion,
			LicenseDeclared: noAssertion, LicenseConcluded: noAssertion, Copyright: noAssertion,
			References: []externalRef{{Category: "PACKAGE-MANAGER", Type: "purl", Locator: p.url}},
		})
		d.Relationships = append(d.Relationships, relationship{From: agentID, Type: "DEPENDS_ON", To: id})
	}
	return d
}

// identifier has of an SPDX identifier the characters that it may have.
func identifier(p part) string {
	return "SPDXRef-" + p.kind + "-" + strings.Map(func(r rune) rune {
		if r == '.' || r == '-' || r < utf8.RuneSelf && (unicode.IsLetter(r) || unicode.IsDigit(r)) {
			return r
		}
		return '-'
	}, p.name)
}

// digest tells documents of different parts apart.
func digest(parts []part) string {
	hash := sha256.New()
	for _, p := range parts {
		hash.Write([]byte(p.url + "\n"))
	}
	return hex.EncodeToString(hash.Sum(nil))[:16]
}
