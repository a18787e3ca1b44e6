//! Limits the size of the status: all tenants of a node share its NodeImage, and etcd rejects one that is too large,
//! for all of them.

use std::collections::{BTreeMap, BTreeSet};

use super::TagKey;
use kruise_api::go_json;
use kruise_api::node_image::{ImageTagStatus, NodeImageStatus};

/// The lengths in bytes to which the messages of a namespace over its share are cut: the largest that fits. There are
/// few steps, so that one additional message rarely changes all the others.
const MESSAGE_LENGTHS: [usize; 6] = [1024, 512, 256, 128, 64, 0];
/// Replaces the text that was cut off.
const ELLIPSIS: char = '…';

/// Cuts messages until the status has at most `max_bytes` in etcd's encoding; everything else is kept. A namespace
/// whose messages need no more than an equal share of the budget keeps them whole. `namespaces` returns the namespaces
/// that a tag is pulled for.
#[must_use]
pub fn fit_to_size<'a>(
    mut status: NodeImageStatus,
    namespaces: impl Fn(&TagKey) -> BTreeSet<&'a str>,
    max_bytes: usize,
) -> NodeImageStatus {
    let total = stored_bytes(&status);
    if total <= max_bytes {
        return status;
    }
    let messages = messages(&status, namespaces);
    let all_bytes: usize = messages.values().map(|message| message.bytes).sum();
    let limits = message_limits(
        messages.values(),
        max_bytes.saturating_sub(total.saturating_sub(all_bytes)),
    );
    for (name, image) in &mut status.image_statuses {
        for tag in &mut image.tags {
            let message = messages.get(&key(name, tag));
            if let Some(limit) = message.and_then(|message| limits.get(message.namespace)) {
                tag.message = tag.message.take().and_then(|text| truncate(text, *limit));
            }
        }
    }
    status
}

/// The status without messages.
#[must_use]
pub fn without_messages(mut status: NodeImageStatus) -> NodeImageStatus {
    let tags = status
        .image_statuses
        .values_mut()
        .flat_map(|image| &mut image.tags);
    tags.for_each(|tag| tag.message = None);
    status
}

/// The bytes of a status in etcd's encoding.
#[must_use]
pub fn stored_bytes(status: &NodeImageStatus) -> usize {
    go_json::encoded_length(&serde_json::to_string(status).unwrap_or_default())
}

/// A tag's message.
struct TagMessage<'a> {
    /// The namespace whose budget the message uses.
    namespace: &'a str,
    bytes: usize,
}

/// The messages. Of the namespaces that a tag is pulled for, the one with the fewest message bytes is charged: what one
/// namespace adds to a tag of a different one does not cut that tag's message.
fn messages<'a>(
    status: &NodeImageStatus,
    namespaces: impl Fn(&TagKey) -> BTreeSet<&'a str>,
) -> BTreeMap<TagKey, TagMessage<'a>> {
    let mut tags = Vec::new();
    let mut namespace_bytes: BTreeMap<&str, usize> = BTreeMap::new();
    for (name, image) in &status.image_statuses {
        for tag in &image.tags {
            let Some(text) = &tag.message else { continue };
            let (key, bytes) = (key(name, tag), message_bytes(text));
            let namespaces = namespaces(&key);
            for namespace in &namespaces {
                *namespace_bytes.entry(namespace).or_default() += bytes;
            }
            tags.push((key, namespaces, bytes));
        }
    }
    let messages = tags.into_iter().map(|(key, namespaces, bytes)| {
        let account = namespaces
            .into_iter()
            .min_by_key(|namespace| (namespace_bytes.get(namespace), *namespace));
        let namespace = account.unwrap_or_default();
        (key, TagMessage { namespace, bytes })
    });
    messages.collect()
}

/// The maximum bytes of a message by namespace, if not all fit into `budget`: the namespaces that need least come
/// first, and the rest of their equal share goes to the others.
fn message_limits<'a, 'b: 'a>(
    messages: impl Iterator<Item = &'a TagMessage<'b>>,
    mut budget: usize,
) -> BTreeMap<&'b str, usize> {
    let mut namespaces: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for message in messages {
        namespaces
            .entry(message.namespace)
            .or_default()
            .push(message.bytes);
    }
    let mut namespaces: Vec<_> = namespaces.into_iter().collect();
    namespaces.sort_by_key(|(name, bytes)| (bytes.iter().sum::<usize>(), *name));
    let mut remaining = namespaces.len();
    let mut limits = BTreeMap::new();
    for (name, bytes) in namespaces {
        let share = budget / remaining.max(1);
        let truncated_size = |most: usize| bytes.iter().map(|bytes| *bytes.min(&most)).sum::<usize>();
        let mut lengths = [usize::MAX].into_iter().chain(MESSAGE_LENGTHS);
        let limit = lengths
            .find(|most| truncated_size(*most) <= share)
            .unwrap_or_default();
        limits.insert(name, limit);
        budget = budget.saturating_sub(truncated_size(limit));
        remaining -= 1;
    }
    limits
}

fn key(name: &str, tag: &ImageTagStatus) -> TagKey {
    TagKey {
        name: name.to_owned(),
        tag: tag.tag.clone(),
    }
}

/// The bytes of a message with its field in etcd's encoding.
fn message_bytes(text: &str) -> usize {
    r#","message":"""#.len() + text.chars().map(go_json::encoded_width).sum::<usize>()
}

/// The message, cut to at most `max_bytes`.
fn truncate(mut text: String, max_bytes: usize) -> Option<String> {
    if message_bytes(&text) <= max_bytes {
        return Some(text);
    }
    let mut bytes_left = max_bytes.checked_sub(message_bytes("") + ELLIPSIS.len_utf8())?;
    let fits_in = |(_, c): &(usize, char)| {
        let width = go_json::encoded_width(*c);
        let fits = width <= bytes_left;
        bytes_left = bytes_left.saturating_sub(width);
        fits
    };
    let end = text
        .char_indices()
        .take_while(fits_in)
        .last()
        .map_or(0, |(at, c)| at + c.len_utf8());
    text.truncate(end);
    text.push(ELLIPSIS);
    Some(text)
}
