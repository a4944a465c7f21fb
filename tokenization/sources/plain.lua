-- For tokenization/sources/pandoc.py: leave out what stands beside the text, and write a row of a table as a line.

local function nothing() return {} end
local function content(element) return element.content end
local function lowered(element)  -- digits have raised and lowered forms
  if pandoc.utils.stringify(element):match("%a") then return element.content end
end

local function lines_of(table_)
  local simple, lines = pandoc.utils.to_simple_table(table_), {}
  for _, row in ipairs({simple.headers, table.unpack(simple.rows)}) do
    local cells = {}
    for _, cell in ipairs(row) do cells[#cells + 1] = pandoc.utils.stringify(cell) end
    local line = table.concat(cells, "\t")
    if line:match("%S") then lines[#lines + 1] = {pandoc.Str(line)} end
  end
  return pandoc.LineBlock(lines)
end

return {{
  Note = nothing, Image = nothing, HorizontalRule = nothing, Strikeout = nothing,
  BlockQuote = content, Superscript = lowered, Subscript = lowered, SmallCaps = content, Table = lines_of,
}}
