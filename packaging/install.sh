#!/bin/sh
# Installs mpvpn from an archive, on systems without its Debian package.
#
#   sh install.sh                          the archive beside this file
#   sh install.sh --from FOLDER|URL        the archive there: mpvpn-VERSION-ARCH.tar.gz, SHA256SUMS and SHA256SUMS.sig
#   sh install.sh --uninstall [--purge]    removes what was installed; with --purge settings, users and certificates, too
#
#   --key FILE     verify the signature with this public key of GnuPG, instead of the one in this file
#   --downgrade    replace a newer version, too
#   --unsigned     verify the checksum only: for an archive that you have built yourself
#   --root FOLDER  install into this folder, for images; nothing is started
set -eu

# The public key (gpg --export), as base64; empty where the archive was built without a signing key.
public_key='@KEY@'
version='@VERSION@'

say() { printf '%s\n' "$*"; }
die() {
    printf 'install.sh: %s\n' "$1" >&2
    [ $# -lt 2 ] || printf '  next: %s\n' "$2" >&2
    exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }
need() { have "$1" || die "$1 is missing" "install the package $2"; }

help() { sed -n '2,12s/^# \{0,1\}//p' "$0"; }

from='' key='' signed=yes root='' action=install purge=no downgrade=no
while [ $# -gt 0 ]; do
    case $1 in
    --from | --key | --root)
        [ $# -gt 1 ] || die "$1 needs a value" "sh install.sh --help"
        case $1 in
        --from) from=$2 ;;
        --key) key=$2 ;;
        --root) root=${2%/} ;;
        esac
        shift
        ;;
    --unsigned) signed=no ;;
    --downgrade) downgrade=yes ;;
    --uninstall) action=uninstall ;;
    --purge) purge=yes ;;
    -h | --help)
        help
        exit 0
        ;;
    *) die "no such option: $1" "sh install.sh --help" ;;
    esac
    shift
done
[ $purge = no ] || [ $action = uninstall ] || die "--purge is for --uninstall" "sh install.sh --uninstall --purge"
[ -n "$root" ] || [ "$(id -u)" -eq 0 ] || die "this changes the system, which takes root" "sudo sh install.sh"

# The list of installed files, for the next installation and for --uninstall.
list=$root/usr/local/share/mpvpn/installed
# Whether a service manager is there to be told.
runs_systemd() { [ -z "$root" ] && [ -d /run/systemd/system ]; }

temporary=''
trap '[ -z "$temporary" ] || rm -rf "$temporary"' EXIT

# fetch NAME: gets a file of the release.
fetch() {
    case $from in
    https://* | http://*)
        if have curl; then
            curl -fsSL --max-time 600 "${from%/}/$1" -o "$temporary/$1" || return 1
        elif have wget; then
            wget -q -T 60 "${from%/}/$1" -O "$temporary/$1" || return 1
        else
            die "neither curl nor wget is installed" "install curl, or download the files and use --from FOLDER"
        fi
        ;;
    *) [ -f "$from/$1" ] && cp "$from/$1" "$temporary/$1" || return 1 ;;
    esac
}

# The signature is one of the list of checksums, which thus holds for the archive.
verify() {
    if [ $signed = yes ]; then
        need gpgv gpgv
        if [ -n "$key" ]; then
            [ -f "$key" ] || die "there is no key at $key" "name the file of the public key by --key"
            case $(head -c 5 "$key") in
            -----)
                need gpg gnupg
                gpg --batch --quiet --yes --output "$temporary/key" --dearmor "$key"
                ;;
            *) cp "$key" "$temporary/key" ;;
            esac
        elif [ -n "$public_key" ]; then
            printf '%s' "$public_key" | base64 -d >"$temporary/key"
        else
            die "this archive was built without a signing key" \
                "--key FILE with the key of those who built it; --unsigned only if that was you"
        fi
        fetch SHA256SUMS.sig || die "SHA256SUMS.sig is not at $from" "get it from where the archive is from"
        gpgv --quiet --keyring "$temporary/key" "$temporary/SHA256SUMS.sig" "$temporary/SHA256SUMS" 2>"$temporary/said" || {
            cat "$temporary/said" >&2
            die "the signature is not of this key: nothing was installed" "get the files again from where you trust them"
        }
    else
        case $from in http://*) die "--unsigned takes no files by http" "use https, or a folder" ;; esac
        say "the signature is not verified, as --unsigned says"
    fi
    wanted=$(awk -v name="$archive" '$2 == name || $2 == "*" name { print $1; exit }' "$temporary/SHA256SUMS")
    [ -n "$wanted" ] || die "SHA256SUMS does not name $archive" "get the files again"
    found=$(sha256sum "$temporary/$archive" | cut -d ' ' -f 1)
    [ "$found" = "$wanted" ] ||
        die "$archive is damaged: its SHA-256 is $found, and should be $wanted; nothing was installed" "get it again"
}

# make_folders FOLDER: makes a folder and those above it, and remembers which were not there.
make_folders() {
    [ ! -d "$root$1" ] || return 0
    make_folders "$(dirname "$1")"
    mkdir "$root$1"
    printf '%s/\n' "$1" >>"$temporary/made"
}

install_all() {
    arch=$(uname -m)
    case $arch in x86_64) arch=amd64 ;; aarch64) arch=arm64 ;; esac
    archive=mpvpn-$version-$arch.tar.gz
    [ -n "$from" ] || from=$(dirname "$0")
    need tar tar
    need sha256sum coreutils
    if [ -z "$root" ] && have dpkg-query && dpkg-query -W -f '${Status}' mpvpn 2>/dev/null | grep -q 'ok installed'; then
        die "the Debian package mpvpn is installed" "apt-get install ./mpvpn_*.deb for a new version, or apt-get remove mpvpn first"
    fi
    # An old release is signed, too. Marks of previews, as in 1.0.0-rc1, sort before the end with a tilde only.
    before=$("$root/usr/local/bin/mpvpn" --version 2>/dev/null | cut -d ' ' -f 2) || :
    newest=$(printf '%s\n' "$before" "$version" | sed 's/-/~/' | sort -V | tail -n 1 | sed 's/~/-/')
    [ "$newest" != "$before" ] || [ "$before" = "$version" ] || [ $downgrade = yes ] ||
        die "mpvpn $before is installed, which is newer than $version: nothing was installed" "get a newer release; --downgrade if you mean it"
    temporary=$(mktemp -d)
    fetch SHA256SUMS || die "SHA256SUMS is not at $from" "--from FOLDER or URL names where the release is"
    fetch "$archive" || die "$archive is not at $from" "a release for this processor ($arch) is needed"
    verify

    tar -xzf "$temporary/$archive" -C "$temporary" --no-same-owner
    tree=$temporary/mpvpn-$version-$arch
    if [ -e "$root/usr/local/bin/mpvpn" ] && [ ! -e "$list" ]; then
        say "replacing $root/usr/local/bin/mpvpn, which was copied there by hand"
    fi
    upgrade=no
    [ ! -e "$list" ] || upgrade=yes
    (cd "$tree" && find . -type f | sed 's|^\.||' | sort) >"$temporary/new"
    : >"$temporary/made"
    # What an earlier version had and this one has not. Folders end with a slash.
    if [ $upgrade = yes ]; then
        grep '/$' "$list" >"$temporary/made" || :
        grep -v '/$' "$list" | grep -vxF -f "$temporary/new" | while read -r gone; do rm -f "$root$gone"; done
    fi
    while read -r file; do
        make_folders "$(dirname "$file")"
        # A running program cannot be written, but replaced.
        cp -p "$tree$file" "$root$file.new"
        mv "$root$file.new" "$root$file"
    done <"$temporary/new"
    make_folders /usr/local/share/mpvpn
    mkdir -p "$root/etc/mpvpn"
    cat "$temporary/new" "$temporary/made" >"$list"

    if have systemd-sysusers; then
        systemd-sysusers ${root:+--root="$root"} mpvpn.conf
    elif [ -z "$root" ]; then
        say "the user mpvpn cannot be made without systemd-sysusers: useradd --system --home-dir /var/lib/mpvpn mpvpn; groupadd --system mpvpn-admin"
    fi
    # Members of the group mpvpn see the status only: tokens are for the group of the services.
    [ $upgrade = no ] || [ -n "$root" ] || find /etc/mpvpn -xdev -type f -group mpvpn -exec chgrp mpvpn-admin {} + || :
    if runs_systemd; then
        systemd-tmpfiles --create mpvpn.conf || :
        systemctl daemon-reload
        systemctl enable --quiet mpvpn-kill-switch.service
        systemctl start mpvpn-kill-switch.service || :
        [ $upgrade = no ] ||
            systemctl try-restart mpvpn-server.service mpvpn-client.service 'mpvpn-server@*.service' 'mpvpn-client@*.service'
    fi
    have nft || say "nft is missing, which servers and clients need: install the package nftables"
    say "mpvpn $version is installed: \`mpvpn setup server\` or \`mpvpn setup client LINK\` is next; to see the status without sudo: usermod -aG mpvpn NAME"
}

uninstall() {
    [ -e "$list" ] || die "there is no installation by install.sh" "for the Debian package: apt-get purge mpvpn"
    if runs_systemd; then
        systemctl stop 'mpvpn-*' || :
        for wanted in /etc/systemd/system/*.wants/mpvpn-*; do
            [ ! -L "$wanted" ] || rm -f "$wanted"
        done
        # What a killed process left, and the block of a kill switch.
        /usr/local/bin/mpvpn reset >/dev/null || :
    fi
    temporary=$(mktemp -d)
    sort -r "$list" >"$temporary/all"
    rm -f "$list"
    grep -v '/$' "$temporary/all" | while read -r file; do rm -f "$root$file"; done
    # The inner folders first; those with files of others stay.
    grep '/$' "$temporary/all" | while read -r made; do rmdir "$root$made" 2>/dev/null || :; done
    rmdir "$root/etc/mpvpn" 2>/dev/null || :
    if runs_systemd; then systemctl daemon-reload; fi
    if [ $purge = yes ]; then
        rm -rf "$root/etc/mpvpn" "$root/var/lib/mpvpn" "$root/var/lib/mpvpn-dns"
        if [ -z "$root" ]; then
            rm -rf /run/mpvpn /run/mpvpn-dns /run/mpvpn-resolv.conf
            ! have userdel || userdel mpvpn 2>/dev/null || :
            for group in mpvpn mpvpn-admin mpvpn-bypass mpvpn-tunnel; do ! have groupdel || groupdel $group 2>/dev/null || :; done
        fi
        say "mpvpn is removed, with its settings and users"
    else
        say "mpvpn is removed; settings and users stay in /etc/mpvpn and /var/lib/mpvpn (--purge removes them, too)"
    fi
}

case $action in
install) install_all ;;
uninstall) uninstall ;;
esac
